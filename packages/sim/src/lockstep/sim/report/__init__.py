"""The report of a simulated run, or of several rates of one workload: one HTML file that opens anywhere, offline.

    write_report("runs/0192/report.html", [ReportRun("8 req/s", facts, data)], title="azure-code on 1 x H200")

It loads nothing, its policy forbids it to, and everything that came from a user is escaped. `page.py` puts it together
from `answer.py`, `comparison.py` and `details.py`; `payload.py` packs the numbers that `charts.js` and `timeline.js`
draw and `page.js` places.
"""

from lockstep.sim.report.page import render_report, write_report
from lockstep.sim.report.report_run import ReportRun

__all__ = ["ReportRun", "render_report", "write_report"]
