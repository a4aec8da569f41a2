"""The server's own `/v1/files` and `/v1/batches`: a process beside the server that keeps them in storage and runs batches."""
