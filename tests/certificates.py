"""A certificate authority (CA) for tests, which makes certificates and keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aiocoll.credentials import TlsFiles

__all__ = ["Authority", "as_options", "as_variables", "secret_of"]

DAY = timedelta(days=1)


class Authority:
    """A certificate authority (CA) whose files are in a folder.

    Args:
        folder: the folder for all files; `<name>.pem` is the certificate of the CA.
        name: the name of the CA.
        days: first and last moment of the CA's validity, in days from now.
        above: the CA that signs the CA's certificate; None for a self-signed one.
        proper: whether the certificate is marked as that of a CA.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "ca",
        days: tuple[float, float] = (-1, 30),
        above: Authority | None = None,
        proper: bool = True,
    ) -> None:
        self.folder = folder
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key, [], days, above or self, ca=proper)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def make(
        self,
        *names: str,
        file: str = "own",
        days: tuple[float, float] = (-1, 30),
        uses: Sequence[x509.ObjectIdentifier] = (),
        ca: Path | None = None,
    ) -> TlsFiles:
        """Make a certificate for `names`, and replace the files `<file>.pem` and `<file>.key`.

        Names are URIs, or DNS names with the prefix ``DNS:``.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign("rank", key, names, days, self, uses=uses)
        public, private = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private.unlink(missing_ok=True)
        private.touch(mode=0o600)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsFiles(str(ca or self.file), str(public), str(private))

    @staticmethod
    def middle(files: TlsFiles) -> float:
        """Return the middle of the certificate's validity, in seconds since 1970."""
        certificate = x509.load_pem_x509_certificate(Path(files.certificate).read_bytes())
        return (certificate.not_valid_before_utc.timestamp() + certificate.not_valid_after_utc.timestamp()) / 2

    def _sign(
        self,
        subject: str,
        key: ec.EllipticCurvePrivateKey,
        names: Sequence[str],
        days: tuple[float, float],
        signer: Authority,
        *,
        ca: bool = False,
        uses: Sequence[x509.ObjectIdentifier] = (),
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        constraints = x509.BasicConstraints(ca=ca, path_length=None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(signer.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
            .add_extension(constraints, critical=True)
            # Python 3.13 and newer refuse certificates without these two extensions by default.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer._key.public_key()), critical=False)
        )
        if ca:
            builder = builder.add_extension(_SIGNS, critical=True)
        if names:
            alternatives = [
                x509.DNSName(name[4:]) if name.startswith("DNS:") else x509.UniformResourceIdentifier(name)
                for name in names
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return builder.sign(signer._key, hashes.SHA256())


#: Key usages of a CA.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def as_options(files: TlsFiles) -> dict[str, Any]:
    """Return the group options that contain the paths of the certificate files."""
    return {f"tls_{name}": path for name, path in files._asdict().items()}


def as_variables(files: TlsFiles) -> dict[str, str]:
    """Return the environment variables that contain the paths of the certificate files."""
    return {f"AIOCOLL_{name.upper()}": path for name, path in as_options(files).items()}


def secret_of(files: TlsFiles) -> list[bytes]:
    """Return byte strings that would reveal the private key: the lines of its file, and the encoded number."""
    text = Path(files.key).read_bytes()
    key = serialization.load_pem_private_key(text, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    number = key.private_numbers().private_value
    return [*text.split(b"\n")[1:-2], number.to_bytes(32, "big"), f"{number:x}".encode(), str(number).encode()]
