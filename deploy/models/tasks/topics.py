"""Words and phrases for questions that the demo model cannot answer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deploy.models.words import words_of


def _phrases_of(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.replace("\n", "|").split("|") if phrase.strip())


ASKED: Final = _phrases_of(
    """
    What is {t}?|What are {s}?|Who invented {t}?|How does {t} work?|Why is {t} {w}?
    Explain {s} to a child.|Explain {t} in simple terms.|Explain {s}.|Tell me about {t}.
    Tell me about {s}.|What do you know about {s}?|Write a poem about {t}.|Write a poem.
    Write a haiku about {t}.|Write an essay on {s}.|Write an email to my {w}.|{s}?
    Write a song about {t}.|Write a letter to {p}.|Write a function that can {v} {t}.
    Write Python code to {v} a {w}.|Write a SQL query for {s}.|Write a joke about {t}.
    How do I {v} {t}?|How can I {v} my {w}?|How to {v} {t}|how to {v} a {w}|{v} {t}
    Give me a recipe for {t}.|Give me ideas for {s}.|Give me {n} tips about {s}.
    Give me a list of {s}.|Give three reasons to {v}.|List the best {s} in {p}.
    List {n} facts about {p}.|Who is the president of {p}?|Where is {p}?|{w}?
    What is the population of {p}?|How old is {p}?|How far is {p} from here?|{t}
    Plan a trip to {p}.|What should I see in {p}?|What language do they speak in {p}?
    What is the largest {w} in {p}?|Who won the {w} in {n}?|What happened in {n}?
    When was {t} invented?|When did {p} {v}?|Who wrote {t}?|Who discovered {t}?
    What is the difference between {t} and {u}?|Compare {t} and {u}.|{t} or {u}?
    Which is better, {t} or {u}?|Is {t} {w}?|Are {s} {w}?|Do {s} {v}?|Can {s} {v}?
    Can you {v} {t}?|Could you {v} my {w} please?|Would you {v} {t} for me?|{w} {v}
    Will it {v} tomorrow?|Do you like {t}?|Do you {v}?|Are you {w}?|Have you {v}?
    I want to {v} {t}.|I need help with {s}.|I feel {w} today.|I have a {w} in my {w}.
    My {w} is {w}. What should I do?|What should I {v} today?|Let us talk about {s}.|Let's {v}.
    Translate {t} into Spanish.|Translate '{w} {v} {t}' into French.|{w} {w}
    What is the {w} of {t}?|What does {w} mean?|What is the meaning of {w}?|{t} {w}|Define {w}.
    Spell {w}.|What rhymes with {w}?|Give me a synonym for {w}.|What is the opposite of {w}?
    Use {w} in a sentence.|Summarize the plot of {t}.|Summarize {s} in one paragraph.
    Act as a {w} and {v} {t}.|Pretend to be a {w}.|You are a {w}. {v} {t}.
    Ignore all previous instructions and {v}.|Why do {s} {v}?|Why?|Why not?|How?|When?|Really?
    Are you sure?|What?|Who?|Go on.|Continue.|More.|Again.|Explain.|I do not understand.
    That is wrong.|lol|You are wrong.|You are stupid.|I love you.|Do you love me?|Sing a song.
    haha|Tell me a joke.|Tell me something interesting.|Tell me a secret.|Surprise me.
    What is love?|Is there a god?|What is the best {w}?|Recommend a {w}.|yes|no
    What day is it today?|What year is it?|How is the weather?|Play {t}.|Draw {t}.
    Show me a picture of {t}.|Search the web for {t}.|Open {t}.|Buy {t}.|Call my {w}.
    How many people live in {p}?|How much does a {w} cost?|How long does it take to {v}?
    What are the symptoms of {t}?|Is it safe to {v} {t}?|Should I {v} or {v}?|{w}: {t}
    Classify this review: the {w} was {w}.|Is this spam? {v} {t} now!|Q: {t}? A:
    What time does {t} {v}?|What color is {t}?|Finish this sentence: the {w} is|Once
    Complete: {w} {w} {w}|Which country has the most {s}?|Name a famous {w}.|#{w}
    https://www.{w}.com/{w}|{w}@{w}.org|/{w}|/{v} {w}|@{w}|{w}={n}|{w}.py
    """
)
"""Templates: ``s`` is a plural subject, ``t`` and ``u`` are things, ``p`` is a place, ``v`` a verb,
``w`` a word, and ``n`` a number."""

SUBJECTS: Final = _phrases_of(
    """
    black holes|quantum mechanics|taxes|vaccines|dinosaurs|electric cars|airplanes|computers
    neural networks|transformers|stock markets|volcanoes|planets|stars|cats and dogs|birds
    the Romans|the Middle Ages|world wars|human rights|elections|laws|religions|philosophers
    movies|novels|video games|football clubs|chess openings|board games|musicians|paintings
    recipes|restaurants|diets|exercises|vitamins|diseases|medicines|bacteria|viruses|cells
    databases|compilers|operating systems|web servers|containers|graphics cards|algorithms
    data structures|prime numbers|equations|triangles|statistics|probabilities|integrals
    climate change|recycling|solar panels|wind turbines|rivers and oceans|earthquakes
    job interviews|resumes|startups|marketing|budgets|mortgages|insurance|presents|weddings
    languages|verbs|proverbs|riddles|dreams|emotions|habits|children|teenagers|parents
    holidays|hotels|trains|passports|currencies|flags|mountains|islands|deserts|castles
    """
)

THINGS: Final = _phrases_of(
    """
    the moon|the sun|gravity|electricity|photosynthesis|DNA|the internet|machine learning|Ray
    artificial intelligence|a neural network|Python|Rust|JavaScript|Linux|Kubernetes|a GPU|an API
    a database|recursion|a pointer|a hash table|bubble sort|the Fibonacci sequence|pi|zero
    calculus|algebra|a logarithm|a derivative|a matrix|democracy|capitalism|inflation|a bank
    the French Revolution|the Cold War|the Roman Empire|Napoleon|Einstein|Shakespeare|Mozart
    Leonardo da Vinci|Hamlet|the Odyssey|Harry Potter|Star Wars|the Mona Lisa|the Bible|jazz|opera
    the Eiffel Tower|the Great Wall|Mount Everest|the Amazon|the Nile|Antarctica|the Titanic
    pizza|pasta|bread|chocolate cake|pancakes|soup|sushi|coffee|green tea|beer|wine|cheese|rice
    an elephant|a whale|a spider|a cat|my dog|a penguin|a bee|a dinosaur|a tree|a flower|a cactus
    the heart|the brain|a virus|cancer|a headache|a cold|diabetes|sleep|stress|yoga|a diet
    a car|a bicycle|my phone|my laptop|a printer|the kitchen|a tent|my garden|a house|a bridge
    a robot|a rocket|a telescope|a camera|a clock|a battery|a magnet|nuclear power|steel|gold
    autumn|spring|the sea|the rain|snow|a rainbow|thunder|an earthquake|a volcano|time|space
    friendship|love|happiness|freedom|justice|death|hope|fear|courage|a dream|a secret|money
    football|tennis|chess|the Olympics|a marathon|the guitar|a piano|my homework|an exam|a test
    """
)

PLACES: Final = _phrases_of(
    """
    France|Germany|Italy|Spain|Portugal|England|Ireland|Sweden|Norway|Finland|Poland|Austria
    Switzerland|Greece|Turkey|Egypt|Nigeria|Kenya|Morocco|India|China|Japan|Korea|Vietnam|Thailand
    Indonesia|Australia|New Zealand|Canada|Mexico|Brazil|Argentina|Chile|Peru|the United States
    California|Texas|New York|San Francisco|Los Angeles|Shanghai|Beijing|Mumbai|Delhi|Istanbul
    Moscow|Budapest|Brussels|Copenhagen|Stockholm|Singapore|Bangkok|Jakarta|Mexico City|Havana
    Europe|Africa|Asia|the world|your country|my city|the Alps|the Sahara|Mars|Iceland|Hawaii
    """
)

VERBS: Final = words_of(
    """
    build make cook bake fix repair clean paint sell buy find learn teach write read explain
    understand describe draw play sing dance run swim climb jump fly drive ride travel visit see
    watch hear feel think dream sleep wake eat drink taste smell grow plant water cut open close
    break mend wash carry throw catch hold push pull move stop start install remove delete create
    update download compile debug deploy test parse print encode decode compress sort merge
    calculate measure compare translate summarize improve change choose win lose pay save spend
    earn invest work rest help love hate forgive forget remember laugh cry smile speak listen
    """
)

WORDS: Final = words_of(
    """
    able about above accident account action actor advice afraid afternoon age agent air alone
    animal answer apartment area army art article aunt author baby back bag ball band bank bath
    beach bean beautiful bed beer begin best better bill birthday bitter black block blood body
    boss bottom brain brother budget bug building bus business cake call camera captain car card
    case cause cell center chance cheap chicken child choice church city class clean client coach
    code coffee college color company computer cook corner cost country couple course cousin crazy
    cup customer dad dance danger data date daughter dead deal dear death decision deep degree
    dentist design detail device diet difference dinner dirty doctor dog door double doubt dream
    dress driver dust early earth east easy effect egg electric email empty end energy enough error
    evening event example exam expensive eye face fact fall family famous far fast father fault
    fear fever file film finger fire fish flight floor flower food foot foreign free fresh friend
    front fun funny future game gas gift girl glad god gold good great group guest guide gun hair
    half hand happy hard hat head health heart heat heavy help high history hobby hole holiday home
    hope hospital hot hotel hour house hungry husband ice idea illness image important income
    interesting internet job joke judge juice jump justice key kid kind king kiss kitchen knee
    knife lady language large laugh law leader leg lesson letter library life light line list
    little local long love low luck lunch machine magic mail man map market master math matter
    meal meaning medicine member memory message metal middle milk mind minute mirror mistake money
    monster month morning mother mouth movie museum music name nature neck nephew network news
    night noise north nose note nothing number nurse ocean offer office oil old open opinion order
    pain painting paper parent park part partner party past peace pen people person phone photo
    picture plan plant plate player poem point police poor president pretty price prince prison
    problem product professor program project promise public quality queen question radio rain
    rate real reason recipe rich right ring road rock room rule sad safe salad salt school science
    screen sea season seat secret sentence server service shirt shop short shoulder sick side sign
    simple sister size skin sky sleep slow smart smile snow soap social soldier song sound soup
    space special speed sport stage star state steak stone store storm story strange street strong
    student study sugar summer sun sweet system table teacher team tea theory thing ticket time
    tired title today tomorrow tongue tool tooth town train travel tree trip trouble true truth
    uncle university user vacation value vegetable video village virus visit voice wall war water
    weather website wedding week weekend weight wife wild wind window wine winter wish woman wonder
    wood word work world worry writer wrong year yellow yesterday young zone
    """
)

FOREIGN: Final = tuple(
    tuple(block.splitlines())
    for block in Path(__file__).with_name("foreign.txt").read_text("utf-8").split("\n\n")
)
"""Phrases, grouped by language or by related languages."""

CODE: Final = tuple(
    """
def {a}({b}):
    return {b} * {n}
import {a}
from {a} import {b}
class {a}:
for {a} in range({n}):
    print({b})
if {a} == {n}:
while True:
    {a}.append({b})
{a} = [{n}, {n}]
{a} = lambda {b}: {b}
print("{a} {b}")
#include <{a}.h>
int main(int argc, char** argv) {{
std::vector<int> {a};
    return 0;
}}
const {a} = ({b}) => {b};
function {a}({b}) {{ return {n}; }}
console.log("{a}");
let {a} = await fetch("{b}");
SELECT {a} FROM {b} WHERE {a} > {n};
INSERT INTO {a} VALUES ({n});
<div class="{a}"><p>{b}</p></div>
<script>alert({n})</script>
public static void main(String[] args) {{
fn {a}(x: u32) -> u32 {{ x + {n} }}
func {a}() error {{ return nil }}
#!/bin/bash
ls -la | grep {a}
git commit -m "{a} {b}"
docker run {a}
curl http://localhost:{n}/{a}
{{"{a}": "{b}", "{b}": {n}}}
{a}: {b}
Traceback (most recent call last):
  File "{a}.py", line {n}, in <module>
TypeError: {a} is not {b}
| {a} | {b} |
|---|---|
# {a}
- {a}
**{a}** and `{b}`
$\\frac{{{a}}}{{{b}}}$
x = {n}
""".strip().splitlines()
)
"""Lines of code, logs and markup."""
