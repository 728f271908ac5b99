"""`python -m steplab` is the command line, and so is the program `steplab`."""

import sys


def run() -> None:
    """Run the command line and exit; Ctrl-C during imports or at exit leaves no traceback."""
    import signal

    try:
        from steplab.cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python is about to end by itself
    sys.exit(code)


if __name__ == "__main__":
    run()
