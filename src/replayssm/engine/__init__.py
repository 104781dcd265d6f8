"""What turns logits into tokens and tokens into text, request by request."""
