"""Messages to tokens and back: rendering, prefix-stable append, tool-call parsing, drift check.

No torch, no transformers: rollout workers import it. The rooms: `model` (a model's Chat), `conversation` (one episode's
tokens), `template` (Jinja as transformers runs it), `tools` (call formats), `drift` (comparison with a full rendering).
"""

from springtide.chat.conversation import Conversation
from springtide.chat.drift import Drift, measure_drift, undecodable
from springtide.chat.model import Chat, check_vocab, load_chat
from springtide.chat.template import ChatError, ChatTemplate, ContentError
from springtide.chat.tools import FORMATS, ParsedReply, ToolFormat

__all__ = [
    "FORMATS",
    "Chat",
    "ChatError",
    "ChatTemplate",
    "ContentError",
    "Conversation",
    "Drift",
    "ParsedReply",
    "ToolFormat",
    "check_vocab",
    "load_chat",
    "measure_drift",
    "undecodable",
]
