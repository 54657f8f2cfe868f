"""How a command line may end."""


def judge(status: int, errors: str) -> str:
    """Say what is wrong with an exit status and what stands on standard error."""
    lines = errors.strip().splitlines()
    last = lines[-1] if lines else ""
    if status not in (0, 2):
        return f"status {status}: {last}"
    if "Traceback" in errors:
        return f"a traceback: {last}"
    if status == 2 and len(last) < 20:
        return f"no sentence: {last!r}"
    return ""
