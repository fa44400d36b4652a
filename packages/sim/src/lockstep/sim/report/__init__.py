"""The report of a simulated run, or of several rates of one workload: one HTML file that works offline.

    write_report("runs/0192/report.html", [ReportRun("8 req/s", facts, data)], title="azure-code on 1 x H200")

The page loads nothing, enforced by its Content-Security-Policy, and all text from users is escaped. `page.py` assembles
it from `answer.py`, `comparison.py` and `details.py`. `payload.py` packs the numbers, `charts.js` and `timeline.js`
draw them, and `page.js` places the charts.
"""

from lockstep.sim.report.page import render_report, write_report
from lockstep.sim.report.report_run import ReportRun

__all__ = ["ReportRun", "render_report", "write_report"]
