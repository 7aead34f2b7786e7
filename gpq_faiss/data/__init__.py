"""What can be read: images and ready-made features, their labels, and the splits drawn from them."""
