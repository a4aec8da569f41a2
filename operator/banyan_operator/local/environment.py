"""What a process has in its environment before the pod's spec adds to it: what an image would bring, and nothing of the user's.

A variable of the shell that reached a server would make the same manifests behave otherwise in a cluster, and hand credentials to
processes that nobody gave them to. Credentials come from a Secret, other variables from the manifest.
"""

from __future__ import annotations

import site
from collections.abc import Mapping

FROM_THE_MACHINE = (
    "PATH",  # where programs lie that the runtime starts: compilers for kernels, nvidia-smi
    "PYTHONPATH",  # where this very Python found its packages: its servers are to be of the same code
    "LD_LIBRARY_PATH",  # where CUDA and drivers lie that ldconfig does not know (clusters with modules, WSL)
    "CUDA_HOME",  # the CUDA toolkit, by either name, for kernels that are compiled here
    "CUDA_PATH",
    "CUDA_DEVICE_ORDER",  # how the numbers in CUDA_VISIBLE_DEVICES are meant, which decides what pods are given
    "SSL_CERT_FILE",  # the certificate authorities, where a system keeps them in no place that OpenSSL knows
    "SSL_CERT_DIR",
)
"""An image has its own of these; here they are the machine's."""


def of_an_image(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`: this process's own variables."""
    return {
        **{name: environ[name] for name in FROM_THE_MACHINE if name in environ},
        "LANG": "C.UTF-8",  # text is UTF-8 whatever the shell's language
        "PYTHONUNBUFFERED": "1",  # a log that is read while it is written
        "PYTHONUSERBASE": site.getuserbase(),  # packages in the user's home are found though the pod's HOME is another folder
    }
