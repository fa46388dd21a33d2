"""An SSH server that gives a user the files of this machine by SFTP: USER PASSWORD PORT."""

import asyncio
import sys

import asyncssh


class _Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return [username, password] == sys.argv[1:3]


async def _serve() -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(
        _Server, "127.0.0.1", int(sys.argv[3]), server_host_keys=[key], sftp_factory=True
    )
    print("port", server.get_port(), flush=True)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(_serve())
