"""What the ingest job is made of: its configuration, its queries, and the tables they write."""
