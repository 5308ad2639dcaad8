"""Models by their name on the Hugging Face hub: a copy in the hub's cache is used as it is, without asking the net; one that is not
there is fetched where the huggingface_hub package is installed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from maga_transformer.config import hub_cache, hub_endpoint, hub_offline

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w./-]+\.gguf))?")
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pth", "*.pt")
_OTHERS = ["*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]
_COPIES = ["original/*", "onnx/*", "openvino/*", "consolidated*"]  # of the same weights
_ASK_SECONDS = 8.0  # how long the hub may take to say what a model has

Answer = TypeVar("Answer")


def is_hub_name(path: str) -> bool:
    return not Path(path).exists() and _NAME.fullmatch(path) is not None


def local_copy(name: str) -> Path:
    """The folder or file of a model on the hub: organisation/model, or organisation/model/file.gguf. FileNotFoundError or
    ValueError, with what to do, where there is none and none can be had."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise FileNotFoundError(f"{name}: no such file or folder")
    repo, file = match["repo"], match["file"]
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    found = _snapshot(folder, file)
    return found or _fetch(name, repo, file)


def _snapshot(folder: Path, file: str | None) -> Path | None:
    """What the cache holds of a model, if all that was begun has come."""
    head = folder / "refs" / "main"
    if head.is_file():
        place = folder / "snapshots" / head.read_text().strip()
    else:
        kept = sorted(folder.glob("snapshots/*"))
        if len(kept) != 1:
            return None
        place = kept[0]
    if file:
        return place / file if (place / file).is_file() else None
    if any(folder.glob("blobs/*.incomplete")):
        return None
    return place if any(path.is_file() for kind in _WEIGHTS for path in place.glob(kind)) else None


def _fetch(name: str, repo: str, file: str | None) -> Path:
    nowhere = f"{name}: no such file or folder, and no such model in the hub's cache {hub_cache()} (HF_HOME)"
    local = "or give a local path, as CHECKPOINT_PATH=/models/NAME"
    if hub_offline():
        raise FileNotFoundError(f"{nowhere}; HF_HUB_OFFLINE forbids to fetch it: unset it, {local}")
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise FileNotFoundError(f"{nowhere}; to fetch it: pip install huggingface_hub, {local}") from None
    page = f"{hub_endpoint()}/{repo}"
    try:
        about = _within(_ASK_SECONDS, lambda: huggingface_hub.HfApi().model_info(repo, timeout=_ASK_SECONDS / 2))
        files = [sibling.rfilename for sibling in about.siblings or ()]
        patterns = _wanted(name, files, file)
        place = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, ignore_patterns=_ignored(files)))
    except GatedRepoError:
        raise FileNotFoundError(f"{name}: accept the model's conditions at {page} and set HF_TOKEN, {local}") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(f"{nowhere}; nor is it at {page}, or HF_TOKEN does not open it; {local}") from None
    except ValueError:
        raise
    except Exception as error:  # of whichever HTTP client the library has
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"{nowhere}; {page} did not give it ({reason}): set HF_ENDPOINT to a mirror or HF_TOKEN to a key, {local}"
        ) from None
    return place / file if file else place


def _wanted(name: str, files: list[str], file: str | None) -> list[str]:
    """Patterns of what to fetch: the weights in one form, and what is small."""
    if file:
        if file not in files:
            raise ValueError(f"{name}: the model has no such file; it has {', '.join(files)[:500]}")
        return [file]
    for ending in (".safetensors", ".bin", ".pth", ".pt"):
        if any(each.endswith(ending) for each in files):
            return [*_OTHERS, f"*{ending}"]
    gguf = [each for each in files if each.endswith(".gguf")]
    if len(gguf) != 1:
        raise ValueError(f"{name}: give one of its GGUF files, as {name}/FILE.gguf: {', '.join(gguf)[:500] or 'it has none'}")
    return gguf


def _ignored(files: list[str]) -> list[str]:
    return _COPIES if any("/" not in each and not each.startswith("consolidated") for each in files) else []


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Its answer, or TimeoutError: looking up a host's name has no limit of its own."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append((ask(), None))
        except Exception as error:
            told.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not told:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    answer, error = told[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
