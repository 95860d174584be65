"""One run: the request, both lanes racing through it, the events it makes, and what they compare to."""
