"""What the transports of weights are called, for those who only lead: nothing here imports torch."""

HOST_TRANSPORTS = ("filesystem", "shared_memory", "tcp", "lora")
PREFETCH = "/prefetch_weights"  # the route of engines that brings a version near before they pause for it
PREFETCHED = ("filesystem", "shared_memory", "tcp")
DEVICE_TRANSPORTS = ("nccl", "ipc")
NO_PUBLICATION = 0  # trainers count theirs from 1; engines that are up are done with this one
