
// The end of the only script of a report: `timeline.js` stands before it.
const recorded = JSON.parse(document.getElementById("trace").textContent);
new TimelineView(document.getElementById("recorded"), recorded);
