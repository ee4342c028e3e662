"""The text form of actions."""

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.actions import Action, Kind, parse_action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        (" 12B345\t", Action(Kind.BACKWARD, 12, 345)),
        ("0I1", Action(Kind.BACKWARD_INPUT, 0, 1)),
        ("0W1", Action(Kind.BACKWARD_WEIGHT, 0, 1)),
        ("3UNSHARD", Action(Kind.UNSHARD, 3)),
        ("3REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 3)),
        ("1SEND_F0", Action(Kind.SEND_F, 1, 0)),
        ("1RECV_B7", Action(Kind.RECV_B, 1, 7)),
        ("GRAD_NORM", Action(Kind.GRAD_NORM)),
    ],
)
def test_reads_and_writes(text, action):
    assert parse_action(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "1F",
        "1FOO",
        "1f0",
        "1X0",
        "-1F0",
        "1F-0",
        "1 F0",
        "1F0 1F1",
        "1F0x",
        "٣F٣",
        "1UNSHARD0",
        "UNSHARD",
        "1GRAD_NORM",
        "GRAD_NORM1",
        "1F" + "9" * 5000,
        "9" * 5000,
        "\x00",
    ],
)
def test_refuses(text):
    with pytest.raises(MfsdpError, match="MF301") as error:
        parse_action(text)
    assert len(error.value.finding.message) < 150


def test_says_what_is_missing():
    with pytest.raises(MfsdpError, match="F takes a stage and a microbatch"):
        parse_action("1F")
