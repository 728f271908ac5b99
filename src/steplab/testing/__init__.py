"""What tests share. Only tests import it."""
