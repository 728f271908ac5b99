"""Several measurements side by side: what differs, how time scales, faster or slower. No torch."""
