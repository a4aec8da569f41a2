"""What `helm test` runs in a pod: does the operator answer, and does the API server serve our resources?"""

from __future__ import annotations

import asyncio
import sys

import aiohttp

from banyan_operator.cluster import connection
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.connection import Connection
from banyan_operator.kube import kinds


async def check(url: str) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session, session.get(url) as response:
        print(f"{url}: {response.status} {await response.text()}")
        if response.status != 200:
            return 1
    api = Api(Connection(await connection.load()), lambda *_: None)
    try:
        for kind in kinds.RESOURCES:
            try:
                items, _ = await api.list(kind, None)
            except ApiError as error:
                if error.status != 403:  # an operator for some namespaces may not list them all, which shows that they are known
                    print(f"{kind.plural}: {error}")
                    return 1
                items = []
            print(f"{kind.plural}: served, {len(items)} seen")
    finally:
        await api.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(check(sys.argv[1])))
