"""Parts that only training stacks of others use."""
