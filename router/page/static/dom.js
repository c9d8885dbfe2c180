// Creates elements from text: model output is never parsed as HTML.

/** An element with properties and children, which may be strings. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** The element of this page with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Shows an error at the top of the page; an empty message hides it. */
export function notify(message) {
  const notice = byId("notice");
  notice.textContent = message;
  notice.hidden = !message;
}
