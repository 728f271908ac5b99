import os
import signal
import threading

import pytest

from steplab.train.stop import stop_on_signal


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_the_block_goes_on(number):
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop.requested
        send(number)
        assert stop.requested and stop.signal == signal.Signals(number).name
        assert signal.getsignal(number) is not before
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_immediate_and_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as stop:
        send(signal.SIGINT)
        assert stop.requested
        send(signal.SIGINT)
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGINT) is before


def test_terminating_twice_and_one_interrupt_are_patient():
    with stop_on_signal() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            send(number)
    assert stop.requested and stop.signal == "SIGTERM"


def test_another_thread_changes_no_handler():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with stop_on_signal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
