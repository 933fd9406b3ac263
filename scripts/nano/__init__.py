"""Builds springtide-nano: a Qwen3 of a million parameters that knows the suites' tools and little else.

Rooms: `dialogue` (a conversation as text and tokens), `tokenizer` (BPE and template), `drills` and `gold` (what it
learns from), `network` (what learns), `training` (how), `following`, `audit` and `playing` (what came of
it), `packaging` (the shipped directory). `python -m scripts.nano` is the only caller; no training run imports
this. The model card is docs/nano.md.
"""
