"""What training adds to a layer: balance, gradients of what ranks share, distributed state."""
