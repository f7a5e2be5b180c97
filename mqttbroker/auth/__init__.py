"""Authentication and authorization: users, passwords and ACL files."""
