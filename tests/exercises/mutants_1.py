"""Planted wrong answers of chapter 1: exercise -> what is wrong -> edits of the solution, each (old, new)."""

CHAPTER = "01_memory_basics"

MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "1.1": {
        "bits for bytes": [("bus_bits * gbps_per_pin / 8", "bus_bits * gbps_per_pin")],
        "GB divided by 1024": [("bus_bits * gbps_per_pin / 8", "bus_bits * gbps_per_pin * 1e9 / 8 / 2**30")],
        "whole GB per second": [("bus_bits * gbps_per_pin / 8", "bus_bits * gbps_per_pin // 8")],
        "the bandwidth rounded": [("bus_bits * gbps_per_pin / 8", "round(bus_bits * gbps_per_pin / 8, 1)")],
        "the bus forgotten": [("bus_bits * gbps_per_pin / 8", "gbps_per_pin * 8")],
        "GB for GiB": [("nbytes / 2**30", "nbytes / 10**9")],
        "GiB for GB": [("nbytes / 10**9", "nbytes / 2**30")],
        "the pair turned round": [("nbytes / 10**9, nbytes / 2**30", "nbytes / 2**30, nbytes / 10**9")],
        "rounded": [("nbytes / 10**9, nbytes / 2**30", "round(nbytes / 10**9, 1), round(nbytes / 2**30, 1)")],
        "only one number": [("nbytes / 10**9, nbytes / 2**30", "nbytes / 10**9")],
        "as text": [("return bus_bits * gbps_per_pin / 8", "return f'{bus_bits * gbps_per_pin / 8} GB/s'")],
        "printed, not returned": [("return nbytes / 10**9", "nbytes / 10**9")],
        "the printed cases only": [
            (
                "return bus_bits * gbps_per_pin / 8",
                "return {3.186: 2039.04, 2.43: 1555.2, 5.234: 3349.76, 21.0: 1008.0}[gbps_per_pin]",
            )
        ],
    },
    "1.2": {
        "both directions summed": [
            ('link["gb_per_s"] / 2 if link["both_directions"] else link["gb_per_s"]', 'link["gb_per_s"]')
        ],
        "always halved": [
            ('link["gb_per_s"] / 2 if link["both_directions"] else link["gb_per_s"]', 'link["gb_per_s"] / 2')
        ],
        "gigabits": [("(one_way * 1e9)", "(one_way * 1e9 / 8)")],
        "GiB for GB": [("(one_way * 1e9)", "(one_way * 2**30)")],
        "NVLink from the host": [
            ('[link for link in links if sorted(link["connects"]) == sorted([source, target])]', "links")
        ],
        "one order of the ends": [
            (
                'sorted(link["connects"]) == sorted([source, target])',
                'tuple(link["connects"]) == (source, target)',
            )
        ],
        "one end is enough": [
            ('sorted(link["connects"]) == sorted([source, target])', 'source in link["connects"]')
        ],
        "the larger datasheet number": [
            (
                "min(usable, key=lambda link: transfer_time(1, link))",
                'max(usable, key=lambda link: link["gb_per_s"])',
            )
        ],
        "no link is an error": [(" if usable else None", "")],
        "the row for the name": [('["name"] if usable', " if usable")],
    },
    "1.3": {
        "one direction": [("2 * nbytes / best", "nbytes / best")],
        "the mean": [
            ('best = float("inf")', "begin = clock()"),
            ("best = min(best, clock() - start)", "best = (clock() - begin) / (_ + 1)"),
        ],
        "one copy": [("range(7)", "range(1)")],
        "the last copy": [("min(best, clock() - start)", "clock() - start")],
        "the sum of all copies": [
            ('best = float("inf")', "best = 0"),
            ("min(best, clock() - start)", "best + clock() - start"),
        ],
        "GiB per second": [("/ best / 1e9", "/ best / 2**30")],
        "bytes per second": [("/ best / 1e9", "/ best")],
        "sizes in cache kept": [("nbytes < 4 * cache_bytes", "nbytes < 0")],
        "sizes of once the cache": [("nbytes < 4 * cache_bytes", "nbytes < cache_bytes")],
        "exactly four times left out": [("nbytes < 4 * cache_bytes", "nbytes <= 4 * cache_bytes")],
        "the machine's clock": [
            ("start = clock()", "import time; start = time.perf_counter()"),
            ("clock() - start", "time.perf_counter() - start"),
        ],
    },
    "1.4": {
        "cycles times clock": [("cycles / (ghz * 1e9)", "cycles * ghz * 1e-9")],
        "milliseconds": [("cycles / (ghz * 1e9)", "cycles / (ghz * 1e6)")],
        "the article's microsecond": [("cycles / (ghz * 1e9)", "1e-6")],
        "GiB": [("gb_per_s * 1e9 * latency", "gb_per_s * 2**30 * latency")],
        "in kilobytes": [("gb_per_s * 1e9 * latency", "gb_per_s * 1e9 * latency / 1000")],
        "the whole chip for one SM": [("/ (sms * bytes_per_thread)", "/ bytes_per_thread")],
        "rounded down": [("math.ceil(", "int(")],
        "one more than the whole part": [("math.ceil(", "1 + int(")],
        "not rounded": [("math.ceil(", "float(")],
        "a byte for each thread": [("/ (sms * bytes_per_thread)", "/ sms")],
    },
    "1.5": {
        "counts nothing": [("for key, storage in storages(result).items()", "for key, storage in ()")],
        "tensors for storages": [
            (
                "for key, storage in storages(result).items():",
                "for storage in filter(torch.is_tensor, tree_leaves(result)):",
            ),
            ("if key in older or key in self.known:", "key = id(storage)\n            if key in self.known:"),
            ("nbytes = storage.nbytes()", "nbytes = storage.nbytes"),
        ],
        "never counts off": [("self.live_bytes -= nbytes", "pass")],
        "holds every tensor": [
            ("self.known.add(key)", "self.known.add(key); self.kept = (getattr(self, 'kept', ()), result)")
        ],
        "a closure holds the storage": [
            (
                "weakref.finalize(storage, self.ended, key, nbytes)",
                "weakref.finalize(storage, lambda s=storage: self.ended(key, s.nbytes()))",
            )
        ],
        "counts what was there before": [("key in older or key in self.known", "key in self.known")],
        "keys never forgotten": [("self.known.discard(key)", "pass")],
        "the peak is the sum of all": [
            ("self.peak_bytes = max(self.peak_bytes, self.live_bytes)", "self.peak_bytes += nbytes")
        ],
        "the peak is the last": [
            ("self.peak_bytes = max(self.peak_bytes, self.live_bytes)", "self.peak_bytes = self.live_bytes")
        ],
        "elements for bytes": [("nbytes = storage.nbytes()", "nbytes = storage.nbytes() // 4")],
        "only the first result": [("in storages(result).items()", "in list(storages(result).items())[:1]")],
        "floats": [("nbytes = storage.nbytes()", "nbytes = float(storage.nbytes())")],
        "shared by all meters": [
            ("        self.live_bytes = 0\n        self.peak_bytes = 0\n", ""),
            ("    def __init__(self):", "    live_bytes = peak_bytes = 0\n\n    def __init__(self):"),
            ("self.live_bytes += nbytes", "LiveBytes.live_bytes += nbytes"),
            ("self.live_bytes -= nbytes", "LiveBytes.live_bytes -= nbytes"),
            ("self.peak_bytes = max(", "LiveBytes.peak_bytes = max("),
        ],
        "the mode doesn't end": [
            (
                "    def ended(self",
                "    def __exit__(self, *error):\n        return None\n\n    def ended(self",
            ),
        ],
        "stops counting at the end of the block": [
            (
                "    def ended(self",
                "    def __exit__(self, *error):\n        self.live_bytes = 0\n"
                "        return super().__exit__(*error)\n\n    def ended(self",
            ),
        ],
        "raises in every operator": [("older = storages", "older = storagez")],
        "exhausts memory": [
            ("older = storages((args, kwargs))", "older = storages((args, kwargs)); bytearray(8 * 2**30)")
        ],
        "ends the process": [("older = storages((args, kwargs))", "import os; os._exit(3)")],
    },
}
