"""What is sent between the server and the users, and the account of it."""
