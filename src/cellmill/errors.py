"""What a user can mend: raised with a message that names the value, what would be right and where to change it."""


class UserError(Exception):
    """Ends as one line on stderr and exit code 2, without a traceback."""


class ConfigError(UserError):
    """An option that is unknown, malformed or impossible."""


class DataError(UserError):
    """A file that is missing, damaged or not what it should be."""
