import pytest

from jtrain.data.sources import Chunk
from jtrain.data.tokenise import Recipe
from jtrain.data.worker import Worker
from jtrain.errors import DataError


@pytest.fixture
def worker():
    worker = Worker("bytes", Recipe())
    yield worker
    worker.close()


def test_a_worker_raises_here_what_it_met_and_goes_on(tmp_path, worker):
    with pytest.raises(DataError, match=r"gone\.txt can't be read") as error:
        worker.run(Chunk(str(tmp_path / "gone.txt"), "text"), str(tmp_path / "out"))
    assert error.value.remedy
    (tmp_path / "a.txt").write_text("abc")
    assert worker.run(Chunk(str(tmp_path / "a.txt"), "text"), str(tmp_path / "out")).tokens == 4


def test_a_worker_that_dies_is_named_with_its_file(tmp_path, worker):
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(DataError, match=r"a\.txt: the process that tokenised it ended with -9"):
        worker.run(Chunk(str(tmp_path / "a.txt"), "text"), str(tmp_path / "out"))


def test_a_worker_ends_when_its_parent_is_gone(worker):
    worker._process.stdin.close()
    assert worker._process.wait(10) == 0
