"""`kg`: multi-hop questions over an RDF graph of real facts, asked through AgentBench's seven tools.

`schema` names what there is, `graph` holds it, `programs` say what a question means, `environment` plays it;
`generate` wrote the questions, once. Sources and licences: ATTRIBUTION.md.
"""

from springtide.env import Suite
from springtide.suites.kg.environment import KnowledgeGraph

SUITE = Suite.of(KnowledgeGraph)
