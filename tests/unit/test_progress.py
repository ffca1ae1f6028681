"""Lengths and ids of sequences as arrays agree with lists, whatever comes in one commit."""

import random

from antiphon.actors.columns import pack, sequence, unpack
from antiphon.actors.progress import Progress
from antiphon.actors.protocol import Commit


def test_arrays_agree_with_lists() -> None:
    draw, progress, handles, generation = random.Random(5), Progress(4), list(range(0, 200, 9)), 0
    ids: dict[int, list[int]] = {}
    looks: dict[int, int] = {}
    for _ in range(1500):
        if handles and draw.random() < 0.2:
            generation += 1
            number = sequence(handles.pop(), generation)
            ids[number] = [draw.randrange(99) for _ in range(draw.randrange(1, 11))]
            total = len(ids[number])
            progress.open(number, total - 1, pack(ids[number][total // 4 * 4:]), total)
            looks[number] = (total - 1) // 4 * 4 + 4
            progress.look_at(number, looks[number])
        elif ids and draw.random() < 0.1:
            number = draw.choice(list(ids))
            progress.close(number)
            del ids[number]
            handles.append(number & 0xFFFF)
        elif ids:
            chosen = draw.sample(list(ids), draw.randrange(1, len(ids) + 1))
            gone = draw.random() < 0.2
            new = {n: [draw.randrange(99) for _ in range(draw.choice((1, 1, 0, 5, 64)))] for n in chosen}
            if draw.random() < 0.5:
                new = {n: [draw.randrange(99)] for n in chosen}
            starts = [len(ids[n]) - 1 for n in chosen]
            for number in chosen:
                ids[number] += new[number]
            lengths = [max(start + 1, len(ids[n]) - 1) for start, n in zip(starts, chosen, strict=True)]
            offsets = [0]
            for number in chosen:
                offsets.append(offsets[-1] + len(new[number]))
            flat = [i for n in chosen for i in new[n]]
            if gone:  # somebody who was closed while the step was in flight
                chosen, starts, lengths = [*chosen, 1 << 20 | 60000], [*starts, 5], [*lengths, 6]
                offsets, flat = [*offsets, offsets[-1] + 1], [*flat, 1]
            due = progress.commit(
                Commit(1, pack(chosen), pack(starts), b"", b"", pack(offsets), pack(flat), pack(lengths)))
            for number, length in zip(chosen, lengths, strict=True):
                if number not in ids:
                    continue
                assert progress.length(number) == length
                assert progress.end(number) == min(length, len(ids[number]))
                end = progress.end(number)
                begin = max(0, end // 4 * 4 - 4)
                if number in due:
                    tail = progress.ids(number, end // 4 * 4, len(ids[number]))
                    assert unpack(tail).tolist() == ids[number][end // 4 * 4:]
                    if len(new[number]) == 64:
                        assert unpack(progress.ids(number, begin, end)).tolist() == ids[number][begin:end]
                    looks[number] = length // 4 * 4 + 4
                    progress.look_at(number, looks[number])
                else:
                    assert length < looks[number]
