"""Scripts that make shells complete `fnddp`: its commands, their options, and what an option may be."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

MODELS = ("digits", "transformer", "deep", "gpt2", "resnet18")


@dataclass(frozen=True)
class Option:
    """An option, and the words that may follow it; files if there are none."""

    flags: tuple[str, ...]
    words: tuple[str, ...]
    takes_value: bool
    help: str


@dataclass(frozen=True)
class Command:
    """A command, the words that it takes itself, and its options."""

    name: str
    help: str
    words: tuple[str, ...]
    options: tuple[Option, ...]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for `shell`: "bash", "zsh" or "fish"."""
    commands = tuple(_commands(parser))
    return "\n".join(_fish(commands) if shell == "fish" else _bash(commands, in_zsh=shell == "zsh"))


def _commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # pyright: ignore[reportPrivateUsage]
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}  # pyright: ignore[reportPrivateUsage]
    for name, command in subparsers.choices.items():
        actions = command._actions  # pyright: ignore[reportPrivateUsage]
        words = [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
        options = [_option(action) for action in actions if action.option_strings]
        yield Command(name, helps[name], tuple(words), tuple(options))


def _option(action: argparse.Action) -> Option:
    words = MODELS if "--model" in action.option_strings else tuple(map(str, action.choices or ()))
    return Option(tuple(action.option_strings), words, action.nargs != 0, action.help or "")


def _bash(commands: tuple[Command, ...], *, in_zsh: bool) -> Iterator[str]:
    if in_zsh:
        yield "autoload -U +X bashcompinit && bashcompinit"
    yield "_fnddp() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield "  if (( COMP_CWORD == 1 )); then"
    yield f'    words="{" ".join(command.name for command in commands)} --help --version"'
    yield '  else case "${COMP_WORDS[1]} $before" in'
    for command in commands:
        for option in command.options:
            if option.words:
                patterns = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
                yield f'    {patterns}) words="{" ".join(option.words)}";;'
    yield '    *) case "${COMP_WORDS[1]}" in'
    for command in commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        yield f'      {command.name}) words="{" ".join(filter(None, [*command.words, flags]))}";;'
    yield "    esac;;"
    yield "  esac; fi"
    yield '  COMPREPLY=( $(compgen -W "$words" -- "$word") )'
    yield "}"
    yield "complete -o default -F _fnddp fnddp"


def _fish(commands: tuple[Command, ...]) -> Iterator[str]:
    yield "complete -c fnddp -n __fish_use_subcommand -f -l version -d 'print the version'"
    for command in commands:
        yield f"complete -c fnddp -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.help)}"
        here = f"complete -c fnddp -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            yield f"{here} -f -a '{' '.join(command.words)}'"
        for option in command.options:
            longs = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
            value = f" -x -a '{' '.join(option.words)}'" if option.words else " -r" if option.takes_value else ""
            yield f"{here} {' '.join(longs)}{value} -d {_quoted(option.help.split('(default')[0].strip())}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
