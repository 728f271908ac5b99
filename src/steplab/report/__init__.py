"""Draws records for people and writes them for programs. Never computes, never imports torch."""
