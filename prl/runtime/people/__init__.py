"""What people see: progress, echo of logs, the last report, addresses and keys of a server."""
