"""Whether the tests run on the compiled twin (`make test-compiled`), and which of them cannot."""

import pytest

from magnetar.client.core import batcher

COMPILED = not str(batcher.__file__).endswith(".py")

replaces_code = pytest.mark.skipif(
    COMPILED, reason="it replaces a function of a compiled module, which calls its own without a look-up"
)
reads_docstring = pytest.mark.skipif(COMPILED, reason="a compiled module has no docstring")
derives = pytest.mark.skipif(COMPILED, reason="it derives from a compiled class, which is closed")
