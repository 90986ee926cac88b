"""What a user can mend: raised with a message that names the value, what would be right and where to change it."""


class UserError(Exception):
    """Ends as one line on stderr and a non-zero exit, without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """An option that is unknown, malformed or impossible."""


class DataError(UserError):
    """A file that is missing, damaged or not what it should be."""


class Stopped(UserError):
    """A run that was asked to stop, saved its state and can go on: nothing is wrong, but it is not done."""

    exit_code = 75  # EX_TEMPFAIL: try again later
