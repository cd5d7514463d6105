"""The exceptions that users meet; every message says what was wrong, where, and what to do.

EagleError
├── ConfigError      an option, a field or a key that cannot be used
├── TargetError      a model that cannot be a target
├── HeadError        a head that does not fit its target
├── CheckpointError  a head checkpoint that cannot be read
├── DataError        a conversation or a data file, with file and line
├── ShardError       a hidden-state shard that is damaged or missing
├── PromptError      a prompt that the target cannot take
├── ProposerError    a draft that no verify can read
├── RanksError       another process of a run that has ended, or does not answer
└── OutputError      a place that cannot be written to

HeadWarning, a UserWarning: a head that loads and fits, but hardly drafts anything that its target says, or may not,
since its config sets fields that are not known.
"""


class EagleError(Exception):
    """The root of every error that a user can cause and mend."""


class ConfigError(EagleError): ...


class TargetError(EagleError): ...


class HeadError(EagleError): ...


class CheckpointError(EagleError): ...


class DataError(EagleError): ...


class ShardError(EagleError): ...


class PromptError(EagleError): ...


class ProposerError(EagleError): ...


class RanksError(EagleError): ...


class OutputError(EagleError): ...


class HeadWarning(UserWarning): ...
