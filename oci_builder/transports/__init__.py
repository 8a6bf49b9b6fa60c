"""The outside: every module is one source of images, or one sink for them."""
