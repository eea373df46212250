"""Engines that sample tokens: torch, vLLM and scripted, behind one protocol."""
