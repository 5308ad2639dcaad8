"""The attacked server, and the check around every test that asks for it."""

import concurrent.futures

import pytest

from ..chain_model import write_random
from ..conftest import running_server
from .live import ADMIN, GROWTH, KEY, Target

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
CONTEXT = 256
SETTINGS = {
    "LOAD_FORMAT": "dummy",
    "CHAT_TEMPLATE": TEMPLATE,
    "MAX_SEQ_LEN": str(CONTEXT),
    "MAX_NUM_SEQS": "32",
    "KV_CACHE_MEM_MB": "16",
    "THREADS": "1",
    "READ_TIMEOUT": "2",
    "MAX_QUEUE": "128",
    "MAGA_API_KEY": KEY,
    "MAGA_ADMIN_API_KEY": ADMIN,
    "FT_SERVER_TEST": "1",
    "LOG_LEVEL": "INFO",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("hostile") / "tiny", CONTEXT)


@pytest.fixture(scope="package")
def attacked(tiny):
    with running_server(tiny, **SETTINGS) as server:
        target = Target(server)
        target.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_regex": "a"})  # grammars want the vocabulary
        with concurrent.futures.ThreadPoolExecutor(8) as pool:  # and what many long texts take is taken now
            list(pool.map(lambda _: target.ask("/", b'{"prompt": "' + b"a" * (1 << 20) + b'"}'), range(16)))
        yield target


@pytest.fixture
def target(attacked, request):
    """With the check behind the test. @pytest.mark.grows(MiB): by how much it may grow."""
    mark = request.node.get_closest_marker("grows")
    with attacked.live(mark.args[0] if mark else GROWTH):
        yield attacked
