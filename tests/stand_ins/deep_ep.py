"""What `prl.models.experts.deepep` uses of DeepEP, by torch's collectives on CPU: for tests, not for use.

Results of asynchronous calls are NaN until their event is waited for, and nothing may be sent that is not there yet.
"""

import torch
import torch.distributed as dist


class Event:
    """`arrive` fills in the results of the call that the event ends."""

    def __init__(self, arrive=lambda: None):
        self.arrive = arrive

    def current_stream_wait(self):
        self.arrive()


def delayed(*values):
    """Tensors of NaN, and the event whose wait fills in `values`."""
    results = [torch.full_like(value, torch.nan) for value in values]

    def arrive():
        with torch.no_grad():
            for result, value in zip(results, values, strict=True):
                result.copy_(value)

    return results[0] if len(results) == 1 else results, Event(arrive)


class Config:
    def __init__(self, bytes_per_row_byte):
        self.bytes_per_row_byte = bytes_per_row_byte

    def get_nvl_buffer_size_hint(self, row_bytes, ranks):
        return self.bytes_per_row_byte * row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes, ranks):
        raise RuntimeError("NVSHMEM is disable during compilation")  # as a DeepEP for one node says


class Buffer:
    num_sms = 20

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.calls = []

    @staticmethod
    def set_num_sms(num_sms):
        assert num_sms % 2 == 0
        Buffer.num_sms = num_sms

    @staticmethod
    def capture():
        return Event()

    @staticmethod
    def get_dispatch_config(ranks):
        return Config(3)

    @staticmethod
    def get_combine_config(ranks):
        return Config(5)

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream):
        assert topk_idx.dtype == torch.int64
        assert previous_event is not None
        held = num_experts // self.size
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)]).int()
        in_rank = torch.stack([(topk_idx.div(held, rounding_mode="floor") == r).any(1) for r in range(self.size)], 1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert not x.isnan().any()
        assert x.is_contiguous()
        assert len(x)
        assert not allocate_on_comm_stream or (async_finish and previous_event is not None)
        self.calls.append("dispatch")
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            chosen, sent, received, tokens = handle
            assert len(x) == tokens
            rows, event = delayed(self.all_to_all(x[chosen], sent, received))
            return rows, None, None, None, None, event
        assert topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape
        chosen = torch.cat([column.nonzero()[:, 0] for column in is_token_in_rank.unbind(1)])  # [S], rank by rank
        sent = num_tokens_per_rank.tolist()
        received = self.all_to_all(num_tokens_per_rank.long(), [1] * self.size, [1] * self.size).tolist()
        rows = self.all_to_all(x[chosen], sent, received)
        idx = self.all_to_all(topk_idx[chosen], sent, received)
        weights = self.all_to_all(topk_weights[chosen], sent, received)
        held = len(num_tokens_per_expert) // self.size
        local = idx - self.rank * held
        here = (idx >= 0) & (local >= 0) & (local < held)
        local, weights = local.masked_fill(~here, -1), weights.masked_fill(~here, 0)
        counts = [int((local == e).sum()) for e in range(held)]
        (rows, weights), event = delayed(rows, weights)
        return rows, local, weights, counts, (chosen, sent, received, len(x)), event

    def combine(
        self, x, handle, topk_weights=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert not x.isnan().any()
        assert x.is_contiguous()
        assert not allocate_on_comm_stream or (async_finish and previous_event is not None)
        self.calls.append("combine")
        chosen, sent, received, tokens = handle
        back = self.all_to_all(x, received, sent)
        result = x.new_zeros(tokens, x.shape[1]).index_add(0, chosen, back)
        if topk_weights is None:
            result, event = delayed(result)
            return result, None, event
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        back = self.all_to_all(topk_weights, received, sent)
        weights = topk_weights.new_zeros(tokens, topk_weights.shape[1]).index_add(0, chosen, back)
        (result, weights), event = delayed(result, weights)
        return result, weights, event

    def all_to_all(self, x, sent, received):
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out
