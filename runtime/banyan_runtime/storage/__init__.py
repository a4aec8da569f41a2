"""Objects in folders and S3 buckets behind one small protocol. Imports nothing else of ours but `errors`."""
