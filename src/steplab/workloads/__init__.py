"""What is trained: a shelf of workloads, and the door for a user's own."""
