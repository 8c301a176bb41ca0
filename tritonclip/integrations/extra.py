"""The error for a package that is not there, with the command that installs it."""


def needs(package: str, error: ImportError) -> ImportError:
    """The error in place of another, which is its cause."""
    return type(error)(
        f"tritonclip.integrations needs {package}, which could not be imported: {error}; expected "
        'the extra: pip install "tritonclip[integrations]"',
        name=error.name,
        path=error.path,
    )
