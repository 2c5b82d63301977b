"""The engines behind one seam, `Engine`."""
