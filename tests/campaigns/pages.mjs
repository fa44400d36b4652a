// Opens pages in headless Chromium, at three widths and in both colour schemes, and prints what is wrong with them:
// violations that axe-core finds, pages wider than the window, errors of scripts. Then each page is printed, from a dark
// window: nothing may be cut at the width of the paper, or stay dark. A line of JSON for each view.
import puppeteer from "puppeteer-core";
import {readFileSync, mkdirSync} from "node:fs";
import {createRequire} from "node:module";

const [browserPath, pictures, ...pages] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
if (pictures) mkdirSync(pictures, {recursive: true});
const PATIENCE_MS = 600_000;   // pages are not judged by the speed of a loaded machine
const browser = await puppeteer.launch({executablePath: browserPath, args: ["--no-sandbox"], protocolTimeout: PATIENCE_MS, timeout: PATIENCE_MS});
for (const page of pages) {
  const [name, address] = [page.slice(0, page.indexOf("=")), page.slice(page.indexOf("=") + 1)];
  for (const scheme of ["light", "dark"]) for (const width of [1300, 800, 420]) {
    const tab = await browser.newPage(), problems = [];
    await tab.setBypassCSP(true);   // for axe-core alone: the page itself loads nothing
    await tab.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
    await tab.setViewport({width, height: 900});
    tab.on("pageerror", (error) => problems.push(`error of a script: ${error}`));
    await tab.goto(address, {waitUntil: "load", timeout: PATIENCE_MS});
    if (address.startsWith("http")) await tab.waitForSelector("#rows tr", {timeout: PATIENCE_MS});
    await tab.evaluate(axe);
    const found = await tab.evaluate(() => axe.run(document, {resultTypes: ["violations"]}));
    for (const one of found.violations) for (const node of one.nodes)
      problems.push(`${one.id} (${one.impact}): ${one.help}: ${node.target.join(" ")}`);
    const wide = await tab.evaluate(() => document.documentElement.scrollWidth);
    if (wide > width) problems.push(`the page is ${wide} px wide`);
    if (pictures) await tab.screenshot({path: `${pictures}/${name}-${width}-${scheme}.png`, fullPage: true});
    console.log(JSON.stringify({name, width, scheme, rules: found.passes.length, problems}));
    await tab.close();
  }
  const tab = await browser.newPage(), problems = [], width = 700;   // of A4 between its margins
  await tab.emulateMediaFeatures([{name: "prefers-color-scheme", value: "dark"}]);
  await tab.setViewport({width: 1300, height: 900});
  tab.on("pageerror", (error) => problems.push(`error of a script: ${error}`));
  await tab.goto(address, {waitUntil: "load", timeout: PATIENCE_MS});
  if (address.startsWith("http")) await tab.waitForSelector("#rows tr", {timeout: PATIENCE_MS});
  await tab.setViewport({width, height: 990});
  await tab.emulateMediaType("print");
  await tab.evaluate(() => dispatchEvent(new Event("beforeprint")));
  problems.push(...await tab.evaluate((limit) => {
    const wide = Array.from(document.querySelectorAll("main *")).filter((one) => one.checkVisibility()
      && !one.closest(".unseen") && one.getBoundingClientRect().right > limit + 1);
    const outer = wide.filter((one) => !wide.includes(one.parentElement)).slice(0, 5);
    const found = outer.map((one) => `cut on paper: <${one.tagName.toLowerCase()} class="${one.className.baseVal ?? one.className}"> `
      + `ends at ${Math.round(one.getBoundingClientRect().right)} px: ${(one.textContent || "").trim().slice(0, 60)}`);
    const ground = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
    if (Math.min(...ground.slice(0, 3)) < 200) found.push(`dark on paper: ${ground}`);
    return found;
  }, width));
  await tab.evaluate(() => dispatchEvent(new Event("afterprint")));
  if (pictures) await tab.pdf({path: `${pictures}/${name}.pdf`, format: "A4", timeout: PATIENCE_MS, preferCSSPageSize: true, printBackground: true});
  console.log(JSON.stringify({name, width, scheme: "paper", rules: 0, problems}));
  await tab.close();
}
await browser.close();
