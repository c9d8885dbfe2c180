"""Threads of the compiled library: sharing of a phase, and number of threads for long steps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels.native import build

SOURCES = Path(build.__file__).with_name("src")

CAMPAIGN = """
#include <cstdio>
#include <random>
#include "pace.h"
#include "team.h"

int main() {
  constexpr int kSize = 12;
  rayfleet::Team team(kSize);
  std::mt19937 random(0);
  const auto below = [&](int64_t most) { return (int64_t)(random() % (uint64_t)most); };
  for (int step = 0; step < 400; ++step) {
    // Few, some and all of the threads; phases shorter and longer than they are many.
    const int active = below(3) ? 1 + (int)below(kSize) : 1 + (int)below(3);
    const int64_t phases = 1 + below(4), some = 1 + below(9), slow = below(2 * kSize);
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < phases; ++i) counts.push_back(below(3) ? below(300) : below(kSize));
    std::vector<std::vector<std::atomic<int>>> taken;
    for (const int64_t count : counts) taken.emplace_back(count);
    std::atomic<int> early{0};
    team.run(active, [&](int id) {
      for (int64_t phase = 0; phase < phases; ++phase) {
        if (id == slow) std::this_thread::yield();
        team.share(id, counts[phase], [&](int64_t item) { ++taken[phase][item]; }, some, step % 2);
        for (const auto& times : taken[phase]) early += times != 1;
      }
    });
    if (early) {
      std::printf("step %d: %d items were not done once\\n", step, (int)early);
      return 1;
    }
  }

  // Undisturbed, a thread has the same part of each phase, whichever end it begins with.
  std::vector<int> of_thread[4];
  for (int phase = 0; phase < 4; ++phase) of_thread[phase].assign(8000, -1);
  std::atomic<int> begun{0};
  team.run(2, [&](int id) {
    for (int phase = 0; phase < 4; ++phase) {
      ++begun;
      while (begun < 2 * (phase + 1)) std::this_thread::yield();
      team.share(id, 8000, [&](int64_t item) {
        for (int i = 0; i < 2000; ++i) rayfleet::relax();
        of_thread[phase][item] = id;
      }, 100, phase % 2);
    }
  });
  for (int phase = 0; phase < 4; ++phase) {
    int own = 0;
    for (int item = 0; item < 8000; ++item) own += of_thread[phase][item] == item / 4000;
    std::printf("own %d\\n", own);
  }

  // All threads are twice as quick, but every third step meets a burst, which takes most of that.
  // From the 1000th step on another process takes as much of every step, until the 2000th.
  rayfleet::Pace pace;
  int64_t with_all[3] = {};
  for (int step = 0; step < 3000; ++step) {
    const bool all = pace.takes_all(), slow = step / 1000 == 1 || step % 3 == 1;
    with_all[step / 1000] += all;
    pace.ran(all, all ? (slow ? 0.1 : 2.0) : 1.0);
  }
  for (const int64_t count : with_all) std::printf("all %d\\n", (int)count);
}
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("team")
    source, program = folder / "campaign.cpp", folder / "campaign"
    source.write_text(CAMPAIGN)
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{SOURCES}"]
    subprocess.run(
        [build._compiler(), *flags, str(source), "-o", str(program)], check=True, timeout=120
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_item_is_done_once_before_any_thread_continues(output: str) -> None:
    assert "not done once" not in output


def test_a_thread_has_the_same_part_of_each_phase(output: str) -> None:
    """Under any load, a thread mostly works on its own part."""
    own = [int(line.split()[1]) for line in output.splitlines() if line.startswith("own")]
    assert len(own) == 4
    assert max(own) > 6000, own


def test_bursts_do_not_change_how_many_threads_take_a_step(output: str) -> None:
    early, loaded, late = (int(x.split()[1]) for x in output.splitlines() if x.startswith("all"))
    assert early > 980
    assert loaded < 100, "another process holds all threads up"
    assert late > 800
