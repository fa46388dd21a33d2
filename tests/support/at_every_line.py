"""Something that is done at every line of a call, as a signal handler or a finalizer may."""

import sys


class AtEveryLine:
    """Calls something at every line of sok_lite that this thread runs, as a signal handler may."""

    def __init__(self, work):
        self.work = work
        self.is_in_it = False

    def __call__(self, frame, event, argument):
        if "sok_lite" in frame.f_code.co_filename and not self.is_in_it:
            self.is_in_it = True
            try:
                self.work()
            finally:
                self.is_in_it = False
        return self

    def run(self, operation):
        sys.settrace(self)
        try:
            return operation()
        finally:
            sys.settrace(None)
