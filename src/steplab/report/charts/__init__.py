"""Every picture that steplab draws, as SVG for pages and files or as PNG. No torch."""
