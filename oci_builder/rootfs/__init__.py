"""Live file trees. The only code that touches one."""
