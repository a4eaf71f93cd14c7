// The theme leaves these to the reader's mouse: areas that scroll get the focus of the keyboard, and
// the button bars of code blocks, which the theme adds late, get names of their own.
function mend() {
  for (const area of document.querySelectorAll('pre > code, .md-typeset__scrollwrap'))
    area.tabIndex = 0;
  document.querySelectorAll('nav.md-code__nav').forEach((bar, index) => {
    const name = `Code block ${index + 1}`;
    if (bar.ariaLabel !== name) bar.ariaLabel = name;
  });
}

addEventListener('DOMContentLoaded', () => {
  mend();
  new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
});
