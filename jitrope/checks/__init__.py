"""What is refused, and the words of a call."""
