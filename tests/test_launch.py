"""Files for other machines: they parse, their command accepts its flags, devices, mesh and rows fit each other."""

import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from jax._src.clusters import SlurmCluster
from jax._src.clusters.cloud_tpu_cluster import coordinator_port

from elr_jax.sharding import ACTIVATIONS
from elr_jax.train.__main__ import command_line

LAUNCH = Path(__file__).parents[1] / "launch"
SKY = yaml.safe_load((LAUNCH / "tpu_pod.sky.yaml").read_text())
SLURM = (LAUNCH / "gpu.slurm").read_text()
JOB = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]
POD = JOB["template"]["spec"]["template"]["spec"]
SBATCH = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", SLURM, re.MULTILINE))
TOPOLOGY = POD["nodeSelector"]["cloud.google.com/gke-tpu-topology"]


def words(script):
    """The arguments after `elr_jax.train` of a shell script's command."""
    commands = [shlex.split(line) for line in script.replace("\\\n", " ").splitlines() if "-m elr_jax.train" in line]
    (command,) = [command for command in commands if not command[0].startswith("#")]
    return command[command.index("elr_jax.train") + 1 :]


COMMANDS = {
    "sky": (words(SKY["run"]), int(SKY["resources"]["accelerators"].removeprefix("tpu-v5p-")) // 2),
    "slurm": (words(SLURM), int(SBATCH["nodes"]) * int(SBATCH["gpus-per-node"])),
    "jobset": (POD["containers"][0]["command"][3:], math.prod(map(int, TOPOLOGY.split("x"))) * JOB["replicas"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_accepts_its_flags_and_fits_the_devices(name):
    arguments, devices = COMMANDS[name]
    run = command_line(arguments)
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in run.launch.mesh.split(","))}
    assert math.prod(sizes.values()) == devices
    rows = run.recipe.batch_size // run.recipe.microbatches
    assert rows % math.prod(sizes.get(axis, 1) for axis in ACTIVATIONS["batch"]) == 0
    assert run.launch.save_every and run.launch.processes.count is None, "the environment says who takes part"


def test_a_command_with_an_unknown_flag_is_refused():
    with pytest.raises(SystemExit):
        command_line([*COMMANDS["slurm"][0], "--launch.meshes", "data=16"])


def test_runs_write_to_the_folder_that_is_mounted():
    assert command_line(COMMANDS["sky"][0]).launch.out.startswith(f"{next(iter(SKY['file_mounts']))}/")
    (mount,), (volume,) = POD["containers"][0]["volumeMounts"], POD["volumes"]
    assert command_line(COMMANDS["jobset"][0]).launch.out.startswith(f"{mount['mountPath']}/")
    assert mount["name"] == volume["name"]


def test_the_slurm_script_is_a_shell_script_and_sets_what_jax_reads(monkeypatch):
    subprocess.run(["bash", "-n", LAUNCH / "gpu.slurm"], check=True)
    tasks = int(SBATCH["nodes"]) * int(SBATCH["ntasks-per-node"])
    # what srun gives the last task of this script's job
    step = {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": tasks - 1,
        "SLURM_LOCALID": int(SBATCH["ntasks-per-node"]) - 1,
    }
    for name, value in step.items():
        monkeypatch.setenv(name, str(value))
    assert SlurmCluster.is_env_present()
    assert SlurmCluster.get_process_count() == COMMANDS["slurm"][1], "a process a GPU"
    assert SlurmCluster.get_process_id() == tasks - 1
    assert SlurmCluster.get_local_process_id() < int(SBATCH["gpus-per-node"]) and "gpus-per-task" not in SBATCH
    assert SlurmCluster.get_coordinator_address(None, None).startswith("node01:")
    assert SBATCH["signal"].startswith("TERM@"), "runs stop on SIGTERM"
    assert any(line.startswith("srun ") for line in SLURM.splitlines()), "variables of a step come from srun alone"


def test_the_jobset_s_pods_are_the_hosts_of_the_slice():
    spec = JOB["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    (container,) = POD["containers"]
    chips = spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert chips == math.prod(map(int, TOPOLOGY.split("x")))
    assert int(coordinator_port) in [port["containerPort"] for port in container["ports"]]
    assert (spec["backoffLimit"], POD["restartPolicy"]) == (0, "Never"), "the set restarts as one"


def test_every_file_is_in_the_readme():
    told = (LAUNCH / "README.md").read_text()
    assert all(f"]({path.name})" in told for path in LAUNCH.iterdir() if path.name != "README.md")
