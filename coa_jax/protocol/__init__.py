"""Defines the chain-of-agents protocols: roles, tags, parser, transition automaton and prompts.

A chain of agents is a text in which one model writes all roles of a multi-agent system, each
between the tags of the role. A protocol says which tags exist and in which order they may follow.
The room works on text, and imports `config`, `files` and `errors` only.
"""

from coa_jax.protocol.automaton import State as State
from coa_jax.protocol.automaton import advance as advance
from coa_jax.protocol.automaton import allowed_after as allowed_after
from coa_jax.protocol.automaton import check as check
from coa_jax.protocol.bodies import CRITERIA as CRITERIA
from coa_jax.protocol.bodies import format_code as format_code
from coa_jax.protocol.bodies import format_double_check as format_double_check
from coa_jax.protocol.bodies import format_reflection as format_reflection
from coa_jax.protocol.bodies import parse_boxed as parse_boxed
from coa_jax.protocol.bodies import parse_code as parse_code
from coa_jax.protocol.bodies import parse_double_check as parse_double_check
from coa_jax.protocol.bodies import parse_inspection as parse_inspection
from coa_jax.protocol.bodies import parse_reflection as parse_reflection
from coa_jax.protocol.bodies import parse_solution as parse_solution
from coa_jax.protocol.bodies import parse_urls as parse_urls
from coa_jax.protocol.bodies import split_answers as split_answers
from coa_jax.protocol.built_in import TOOL_FORMS as TOOL_FORMS
from coa_jax.protocol.convert import in_format as in_format
from coa_jax.protocol.convert import observation_body as observation_body
from coa_jax.protocol.formats import BAD_CALL as BAD_CALL
from coa_jax.protocol.formats import FORMATS as FORMATS
from coa_jax.protocol.formats import TAGS as TAGS
from coa_jax.protocol.formats import EpisodeStep as EpisodeStep
from coa_jax.protocol.formats import Format as Format
from coa_jax.protocol.formats import Protocol as Protocol
from coa_jax.protocol.formats import Reader as Reader
from coa_jax.protocol.formats import Segment as Segment
from coa_jax.protocol.formats import Violation as Violation
from coa_jax.protocol.formats import find_format as find_format
from coa_jax.protocol.monitor import Monitor as Monitor
from coa_jax.protocol.parser import Parser as Parser
from coa_jax.protocol.parser import make_parser as make_parser
from coa_jax.protocol.parser import parse as parse
from coa_jax.protocol.parser import quote_tool_text as quote_tool_text
from coa_jax.protocol.parts import part_violations as part_violations
from coa_jax.protocol.prompts import LIBRARIES as LIBRARIES
from coa_jax.protocol.prompts import PROMPT_STYLES as PROMPT_STYLES
from coa_jax.protocol.prompts import QUESTION as QUESTION
from coa_jax.protocol.prompts import Asked as Asked
from coa_jax.protocol.prompts import Messages as Messages
from coa_jax.protocol.prompts import Prompt as Prompt
from coa_jax.protocol.prompts import messages_of as messages_of
from coa_jax.protocol.prompts import render_prompt as render_prompt
from coa_jax.protocol.saved import find_protocols as find_protocols
from coa_jax.protocol.saved import write_protocols as write_protocols
from coa_jax.protocol.spec import LEVELS as LEVELS
from coa_jax.protocol.spec import START as START
from coa_jax.protocol.spec import THINK as THINK
from coa_jax.protocol.spec import TURNS as TURNS
from coa_jax.protocol.spec import FormatName as FormatName
from coa_jax.protocol.spec import Level as Level
from coa_jax.protocol.spec import add_note as add_note
from coa_jax.protocol.spec import add_protocol as add_protocol
from coa_jax.protocol.spec import at_level as at_level
from coa_jax.protocol.spec import get_protocol as get_protocol
from coa_jax.protocol.spec import known_protocols as known_protocols
from coa_jax.protocol.spec import names_with_levels as names_with_levels
from coa_jax.protocol.spec import protocol_names as protocol_names
from coa_jax.protocol.spec import protocol_with_tools as protocol_with_tools
from coa_jax.protocol.spec import restore_protocols as restore_protocols
from coa_jax.protocol.spec import split_level as split_level
